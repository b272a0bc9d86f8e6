"""Weights on the emulated device: packed once by `spaces`, and unpacked in each worker."""

from device_api import device_api
from running_app import generate_data, stream
from visitors import at_rest, on_zerogpu, released

from engine import Engine, EngineConfig, SamplingParams


def test_each_worker_has_the_weights_that_were_packed_once(slow_model, tmp_path, one_thread):
    data = generate_data("The lighthouse stood", max_new_tokens=30, temperature=0)
    config = EngineConfig(model=str(slow_model), device="cpu", dtype="bfloat16", threads=1)
    with Engine.from_pretrained(config=config, device="cpu", host="thread") as engine:
        ordinary = engine.submit("The lighthouse stood", SamplingParams(max_new_tokens=30)).result(60).text
        layers = engine.snapshot()["model"]["layers"]

    settings = {"KVSCOPE_DEVICE": "cuda", "ZEROGPU_OFFLOAD_DIR": tmp_path}
    with device_api() as api, on_zerogpu(slow_model, api, **settings) as app, at_rest(api):
        model = app.stats()["model"]
        assert model["device"] == "cuda:0" and model["dtype"] == "bfloat16" and model["layers"] == layers
        (pack,) = tmp_path.iterdir()
        written = pack.stat().st_mtime_ns
        for reuse in (True, False):
            api.reuse = reuse
            assert list(stream(app, "generate", *data))[-1] == ordinary
            released(api)
        assert len({grant.pid for grant in api.grants}) == 2
        assert list(tmp_path.iterdir()) == [pack] and pack.stat().st_mtime_ns == written
