"""Who may look at what: attention masks over slots, for every kind of layer a model has."""

import torch


def attention_mask(
    config, positions: torch.Tensor, window: int, dtype: torch.dtype
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The mask for queries at `positions` `[rows, queries]` over the first `window` positions of their slots.

    Additive and 4-D `[rows, 1, queries, window]`: a boolean one is turned into it by every layer again. Models
    that mix full and sliding-window layers take one for each type, by name. Models with ALiBi derive their
    bias from a 2-D mask `[rows, window]` of what is valid, which suffices since position is slot index.
    """
    keys = torch.arange(window, device=positions.device)
    queries = positions[:, :, None]
    visible = keys <= queries
    if uses_alibi(config):
        return visible[:, -1]
    full = _additive(visible, dtype)
    layer_types = getattr(config, "layer_types", None) or []
    if is_plain(config, window):
        return full
    sliding = _additive(visible & (keys > queries - config.sliding_window), dtype)
    return {"full_attention": full, "sliding_attention": sliding} if layer_types else sliding


def is_plain(config, length: int) -> bool:
    """Whether in a text of `length` tokens every token may look at all before it, in every layer."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or []
    return not window or length <= window or (len(layer_types) > 0 and "sliding_attention" not in layer_types)


def uses_alibi(config) -> bool:
    """Whether positions enter as a bias on distances (Press et al. 2021)."""
    return bool(getattr(config, "alibi", False)) or config.model_type in ("bloom", "mpt")


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
