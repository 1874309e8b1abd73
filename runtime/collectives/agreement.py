"""Making ranks decide alike: everybody says a text over the host, everybody hears all of them; and waiting with an end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from ..communicator import Communicator

TEXT_BYTES = 1024

T = TypeVar("T")


class Late(Exception):
    """Something did not end in time."""


def exchange(host: Communicator, text: str) -> list[str]:
    """What every rank says, in rank order. Texts longer than TEXT_BYTES are cut off."""
    content = text.encode()[:TEXT_BYTES]
    mine = torch.frombuffer(bytearray(content.ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in host.all_gather(mine)]


def complaints(host: Communicator, mine: str) -> str:
    """All ranks' complaints as one sentence, the same on every rank; empty when nobody has any."""
    said = exchange(host, mine)
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)


def within(seconds: float, job: Callable[[], T], device: torch.device) -> T:
    """`job()` in a thread of its own, which is left behind when it has not ended in time; raises Late then."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread begins with device 0
            with torch.inference_mode():
                results.append(job())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise Late(f"no answer within {seconds:g} s")
    return results[0]
