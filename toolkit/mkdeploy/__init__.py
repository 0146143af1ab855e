"""mkdeploy: run Mixture-of-Experts models whose experts do not fit into memory.

Job: the package's name, its version and the one class that Python users need, `Session`. `Session` is imported on first
use, so that `import mkdeploy` (and with it `mkdeploy --help`) loads neither NumPy nor the native library.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdeploy.bindings.session import Session as Session

__version__ = "0.1.0"
__all__ = ["Session", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Session":
        from mkdeploy.bindings.session import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
