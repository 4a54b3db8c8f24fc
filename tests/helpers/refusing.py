"""Functions that raise, instead of calls that a system refuses."""

__all__ = ["NO_THREAD", "refusing"]


def refusing(kind, *args):
    """Return a function that always raises this exception."""

    def refuse(*_, **__):
        raise kind(*args)

    return refuse


NO_THREAD = refusing(RuntimeError, "can't start new thread")
