"""Which elements of which logical parameter this rank holds, and the norms of the whole ones."""

from .layout import LogicalParameter, Segment, ShardLayout

__all__ = ["LogicalParameter", "Segment", "ShardLayout"]
