"""When memory runs out: what that looks like, and what is said to whom it ends."""

NO_ROOM = "This does not fit into the memory that is left, even alone. Please shorten the text or ask for fewer tokens."
NO_ROOM_FOR_RACE = "The race ended: beside the answers there is no memory left for it. Start it again later."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator gave up: Python's, or torch's on a GPU or a CPU, which says so in words only."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
