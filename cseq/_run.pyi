from typing import Any

from typing_extensions import Self, disjoint_base

from cseq._lock import Lock

@disjoint_base
class RunState:
    asked: bool
    generation: int
    @property
    def lock(self) -> Lock: ...
    def __new__(cls, *args: Any, **kwargs: Any) -> Self: ...
    def supersede(self) -> int: ...
    def resume(self, number: int) -> bool: ...
