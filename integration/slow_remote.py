"""A remote that takes no packs, or no manifests, until a test tells it to."""

import json
from pathlib import Path

PACKS, MANIFESTS = "packs", "checkpoints"
_PARTS = (PACKS, MANIFESTS)


class SlowRemote:
    """A directory, of whose domain a part leads nowhere."""

    def __init__(self, directory: Path, domain: str = "default") -> None:
        """Make it; it takes no packs.

        Args:
            directory: which nodes share.
            domain: the only one in it.
        """
        self.directory, self._domain = directory, directory / "domains" / domain
        self._domain.mkdir(parents=True)
        self.hold()

    def hold(self, part: str = PACKS) -> None:
        """Take nothing of a part; what it has is not seen meanwhile."""
        place = self._domain / part
        if place.exists():
            place.rename(self._held(part))
        place.symlink_to("nowhere")

    def let_go(self) -> None:
        """Take all."""
        for part in _PARTS:
            if (self._domain / part).is_symlink():
                (self._domain / part).unlink()
                if self._held(part).exists():
                    self._held(part).rename(self._domain / part)

    def _held(self, part: str) -> Path:
        return self._domain / f"held-{part}"

    def packs(self) -> set[Path]:
        """Return the packs that are there."""
        return set((self._domain / PACKS).glob("**/*"))

    def announced(self) -> list[Path]:
        """Return the stops that are announced."""
        return list(self._domain.glob("claims/stop-*"))

    def phases(self) -> list[str]:
        """Return how far the announced stops are."""
        return [json.loads(path.read_bytes())["phase"] for path in self.announced()]

    def claims(self) -> list[Path]:
        """Return the claims of checkpoints."""
        return [path for path in self._domain.glob("claims/*") if not path.name.startswith("stop-")]
