"""Do something once a package is imported, without importing it: names enter timm whichever of the two comes first."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(package: str, module: str, *, after: str = "") -> None:
    """Import `module` as soon as `package` is imported: now where it is already, else right after its own import.

    after: a module that `module` needs and that imports the package itself; where its import is under way, we wait for its end.
    timm has no entry points for models from outside, and importing it here would cost seconds to all who do not use it.
    """
    # None in sys.modules means that somebody has forbidden the import
    if sys.modules.get(package) is not None:
        importlib.import_module(module)
    else:
        sys.meta_path.insert(0, _Watcher(package, module, after))
        if after and after not in sys.modules:
            sys.meta_path.insert(0, _Watcher(after, module, ""))


class _Watcher(MetaPathFinder):
    """Lets the other finders find the package and asks its loader to import the module afterwards."""

    def __init__(self, package: str, module: str, after: str) -> None:
        self.package, self.module, self.after = package, module, after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # asked for a spec is not imported: the watch goes on until the loader runs
        if fullname != self.package:
            return None
        # those after this one only: another watcher of the same package, which asks us in turn, would never end
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ThenImport(spec.loader, self)
                return spec
        return None


class _ThenImport(Loader):
    def __init__(self, loader: Loader, watcher: _Watcher) -> None:
        self.loader, self.watcher = loader, watcher

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # from here on the package looks as if nobody had watched
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        if self.watcher in sys.meta_path:
            sys.meta_path.remove(self.watcher)
        self.loader.exec_module(module)
        if _is_under_way(self.watcher.after):
            return
        try:
            importlib.import_module(self.watcher.module)
        except ImportError as error:
            # somebody else's import must not fail for our sake
            warnings.warn(f"{self.watcher.module} is not available in {module.__name__}: {error}", stacklevel=2)


def _is_under_way(module: str) -> bool:
    """Whether the import of a module has begun and not ended."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
