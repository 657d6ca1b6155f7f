"""Which of the server's parameters an update has written, whatever way the model loads them.

Before the load a mark that no weight can be is put at both ends of rows: of every one, or of one or two thousand,
evenly spread, where a matrix has more (slices that models load on their own are larger than the gaps). A mark that
is still there afterwards means a row that was not written (Qwen2, for one, passes over names that it does not know).
Marks left by a partial update are replaced by what stood there. Nothing is generated meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Bit patterns of a signalling NaN with a payload that no computation makes, by bytes and exponent bits.
MARKS = {"bfloat16": 0x7FB5, "float16": 0x7DB5, "float32": 0x7FB55AA5}
#: A matrix with more rows gets marks in at least so many of them.
ROWS = 1024


@dataclass
class _Marked:
    """One parameter: its ends of rows as integers, and what stood there."""

    name: str
    ends: torch.Tensor
    """A view, shape [marked rows, 2]."""
    before: torch.Tensor
    mark: int


class Coverage:
    """Marks on all float parameters of `model`."""

    def __init__(self, model: Any) -> None:
        self._marked: list[_Marked] = []
        try:
            for name, parameter in model.named_parameters():
                if (marked := _mark(name, parameter)) is not None:
                    self._marked.append(marked)
        except BaseException:
            self.unwritten()
            raise

    def unwritten(self) -> list[str]:
        """Take the marks away; returns the parameters of which some row was not written, by the server's names."""
        found = []
        for one in self._marked:
            left = one.ends == one.mark
            if bool(left.any()):
                found.append(one.name)
                one.ends.copy_(one.before.where(left, one.ends))
        self._marked = []
        return found


def _mark(name: str, parameter: torch.Tensor) -> _Marked | None:
    import torch

    data = parameter.data
    mark = MARKS.get(str(data.dtype).removeprefix("torch."))
    if mark is None or data.numel() == 0:
        return None
    whole = data.view(torch.int32 if data.element_size() == 4 else torch.int16)
    rows = whole.reshape(1) if whole.dim() == 0 else whole
    if rows.dim() > 1:
        rows = rows[..., :: max(rows.shape[-2] // ROWS, 1), :]
    width = rows.shape[-1]
    ends = rows[..., :: max(width - 1, 1)]  # the first and the last of each row
    before = ends.clone()
    ends.fill_(mark)
    return _Marked(name, ends, before, mark)
