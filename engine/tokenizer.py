"""The tokenizer that lies in a model's folder, and the ids that end a sequence.

transformers' own imports are inside the functions: the front process needs a tokenizer, and starts seconds earlier
without torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import LoadingError
from engine.model_folder import brings_code, one_line, quiet, read_json
from engine.support import code_refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder, with a pad token; `LoadingError` if there is none."""
    try:
        with quiet():
            tokenizer = _tokenizer_class(folder).from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
    except Exception as error:
        if brings_code(folder, "tokenizer_config.json"):
            raise LoadingError(code_refused(f"The tokenizer in {folder}", trust_remote_code, error)) from error
        raise LoadingError(
            f"{folder} has no usable tokenizer ({one_line(error)}): it needs tokenizer.json and tokenizer_config.json."
        ) from error
    if tokenizer.pad_token_id is None:
        _add_pad_token(tokenizer, read_json(folder / "config.json"))
    return tokenizer


def _tokenizer_class(folder: Path) -> Any:
    """`AutoTokenizer` imports torch; where it would only pick the generic class, that is loaded without it."""
    generic = ("PreTrainedTokenizerFast", "TokenizersBackend")
    named = read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    if named in generic and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _add_pad_token(tokenizer: "PreTrainedTokenizerBase", config: dict[str, Any]) -> None:
    """The model's own pad token, else its end-of-sequence, else a new one."""
    pad = config.get("pad_token_id")
    if isinstance(pad, int) and 0 <= pad < len(tokenizer):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    elif tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    else:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})


def eos_token_ids(folder: Path, trust_remote_code: bool = False) -> frozenset[int]:
    """Every id that ends a sequence: the generation config's, else the config's, else the tokenizer's; or none."""
    for name in ("generation_config.json", "config.json"):
        ids = _as_ids(read_json(folder / name).get("eos_token_id"))
        if ids:
            return ids
    return _as_ids(load_tokenizer(folder, trust_remote_code).eos_token_id)


def _as_ids(value: int | list[int] | None) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    return frozenset(id for id in ids if isinstance(id, int) and id >= 0)
