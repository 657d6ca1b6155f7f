"""Detection of parameters that an update did not write, whatever the model's loading code does.

Before the load, a bit pattern that no weight has (a mark) is written at both ends of rows of every float parameter: of
all rows, or of one to two thousand evenly spaced rows where a matrix has more. (The slices that models load on their
own are larger than the distance between marked rows.) In a parameter with one dimension, elements are marked in the
same way, because biases are fused, too. A mark that is still there after the load belongs to a row that
was not written. Qwen2, for example, ignores names that it does not know. Marks that a partial update leaves are
replaced by the earlier values. No tokens are generated in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MARKS = {"bfloat16": 0x7FB5, "float16": 0x7DB5, "float32": 0x7FB55AA5}
"""Bit pattern of the mark by dtype: a signalling NaN with a payload that no computation produces."""
MIN_MARKED_ROWS = 1024
"""Minimum number of marked rows in a matrix that has more rows than that, and of marked elements in a vector."""


@dataclass
class _MarkedParameter:
    """A parameter with marks."""

    name: str
    row_ends: torch.Tensor
    """A view of the marked elements as integers, shape [..., marked rows, 2]."""
    earlier_values: torch.Tensor
    """The values of `row_ends` before the marks were written."""
    mark: int


class Coverage:
    """Marks on all float parameters of `model`, which show after a load which parameters were not written."""

    def __init__(self, model: Any) -> None:
        self._marked: list[_MarkedParameter] = []
        try:
            for name, parameter in model.named_parameters():
                if (marked := _mark(name, parameter)) is not None:
                    self._marked.append(marked)
        except BaseException:
            self.remove_marks()
            raise

    def remove_marks(self) -> list[str]:
        """Restore the earlier values where marks are left. Returns the parameters that had marks left."""
        unwritten = []
        for parameter in self._marked:
            is_mark = parameter.row_ends == parameter.mark
            if bool(is_mark.any()):
                unwritten.append(parameter.name)
                parameter.row_ends.copy_(parameter.earlier_values.where(is_mark, parameter.row_ends))
        self._marked = []
        return unwritten


def _mark(name: str, parameter: torch.Tensor) -> _MarkedParameter | None:
    """Write marks into a parameter. Returns None for a parameter without elements or of another dtype."""
    import torch

    data = parameter.data
    mark = MARKS.get(str(data.dtype).removeprefix("torch."))
    if mark is None or data.numel() == 0:
        return None
    bits = data.view(torch.int32 if data.element_size() == 4 else torch.int16)
    if bits.dim() < 2:
        bits = bits.reshape(-1, 1)  # a vector is a matrix with rows of one element
    rows = bits[..., :: max(bits.shape[-2] // MIN_MARKED_ROWS, 1), :]
    row_ends = rows[..., :: max(rows.shape[-1] - 1, 1)]  # the first and the last element of each row
    earlier_values = row_ends.clone()
    row_ends.fill_(mark)
    return _MarkedParameter(name, row_ends, earlier_values, mark)
