"""Every bad parameter is named, with its range, before anything happens."""

import pytest

from engine import EngineConfig, SamplingParams, load_config


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_new_tokens", 0, "from 1 to 1000000"),
        ("max_new_tokens", -3, "from 1"),
        ("max_new_tokens", 2**70, "from 1"),
        ("max_new_tokens", 1.5, "a whole number"),
        ("max_new_tokens", "12", "a whole number"),
        ("max_new_tokens", True, "a whole number"),
        ("max_new_tokens", None, "a whole number"),
        ("temperature", float("nan"), "from 0 to 100"),
        ("temperature", float("inf"), "from 0 to 100"),
        ("temperature", -0.1, "from 0 to 100"),
        ("temperature", "hot", "a number"),
        ("temperature", [1], "a number"),
        ("top_k", -1, "from 0"),
        ("top_k", float("nan"), "from 0"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("repetition_penalty", 0, "above 0"),
        ("typical_p", 0, "above 0 and at most 1"),
        ("typical_p", 1.5, "above 0 and at most 1"),
        ("frequency_penalty", -2.5, "from -2 to 2"),
        ("frequency_penalty", float("nan"), "from -2 to 2"),
        ("top_n_tokens", 21, "from 0 to 20"),
        ("top_n_tokens", None, "from 0 to 20"),
        ("prompt_logprobs", 1, "true or false"),
        ("watermark", "yes", "true or false"),
        ("seed", -1, "from 0"),
        ("seed", 2**63, "from 0"),
        ("truncate", 0, "from 1"),
        ("stop", [""], "1 to 256 characters"),
        ("stop", ["x"] * 17, "at most 16"),
        ("stop", 5, "string"),
        ("stop", [5], "string"),
        ("do_sample", "yes", "true, false or None"),
        ("ignore_eos", 1, "true or false"),
    ],
)
def test_bad_values_name_the_field_and_the_range(field, value, allowed):
    with pytest.raises(ValueError, match=f"^{field} must .*{allowed}") as error:
        SamplingParams(**{field: value})
    assert "\n" not in str(error.value) and len(str(error.value)) < 160


def test_a_field_that_does_not_exist_is_named():
    with pytest.raises(TypeError, match="'temprature'"):
        SamplingParams(temprature=1.0)


def test_whole_floats_and_numpy_numbers_are_numbers():
    import numpy

    params = SamplingParams(max_new_tokens=3.0, top_k=numpy.int64(5), temperature=numpy.float32(0.5), stop="end")
    assert (params.max_new_tokens, params.top_k, params.temperature, params.stop) == (3, 5, 0.5, ("end",))
    assert type(params.max_new_tokens) is int and type(params.temperature) is float


@pytest.mark.parametrize(
    ("fields", "samples"),
    [
        ({}, False),
        ({"temperature": 0.7}, True),
        ({"temperature": 0}, False),
        ({"top_k": 5}, True),
        ({"top_p": 0.5}, True),
        ({"typical_p": 0.5}, True),
        ({"frequency_penalty": 0.5, "watermark": True, "top_n_tokens": 3}, False),
        ({"temperature": 0, "top_k": 5, "do_sample": True}, False),
        ({"do_sample": True}, True),
        ({"do_sample": False, "temperature": 1.0}, False),
        ({"repetition_penalty": 1.2}, False),
    ],
)
def test_when_tokens_are_drawn(fields, samples):
    assert SamplingParams(**fields).samples is samples


def test_a_bad_setting_is_one_line_that_names_it(monkeypatch):
    monkeypatch.setenv("KVSCOPE_MAX_BATCH_SIZE", "many")
    with pytest.raises(ValueError, match="KVSCOPE_MAX_BATCH_SIZE: .*'many'") as error:
        load_config()
    assert "\n" not in str(error.value)


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("KVSCOPE_MAX_BATCH_SIZE", "3")
    monkeypatch.setenv("KVSCOPE_MODEL", "")
    assert load_config().max_batch_size == 3 and load_config().model is None
    assert EngineConfig(max_batch_size=5).max_batch_size == 5
