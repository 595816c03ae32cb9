"""The nodes of integration/net, for containers of one job."""

import os

from integration.net.conftest import make_node, peer

__all__ = ["make_node", "peer"]

collect_ignore = [] if os.environ.get("OCIHOOK_NIGHTLY") else ["test_torch.py"]
