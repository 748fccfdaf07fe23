"""Inner products and combinations of the clients' updates, which are long rows of floats."""

from fairfleet.server.gram.blocks import ColumnRule, Matrix, Row
from fairfleet.server.gram.engine import GramEngine
from fairfleet.server.gram.kernel import Kernel
from fairfleet.server.gram.pair_products import PairProducts
from fairfleet.server.gram.products import Detail, Gram, cancels

__all__ = [
    "ColumnRule",
    "Detail",
    "Gram",
    "GramEngine",
    "Kernel",
    "Matrix",
    "PairProducts",
    "Row",
    "cancels",
]
