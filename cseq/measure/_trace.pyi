from typing import Final

import numpy as np
from numpy.typing import NDArray

TAKEN: Final[np.dtype[np.void]]

def begin_log(size: int) -> None: ...
def end_log() -> tuple[NDArray[np.void], int]: ...
def drop_log() -> None: ...
