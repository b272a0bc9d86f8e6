"""The way from the host to the device: numbers that a step needs there, sent without waiting for the device."""

import torch


def to_device(values: list, device: torch.device) -> torch.Tensor:
    """`values`, nested as a tensor's are, on `device`. From pinned memory to a GPU, where plain memory would wait."""
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.tensor(values, pin_memory=True).to(device, non_blocking=True)
