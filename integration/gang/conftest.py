"""The nodes of integration/net, for containers of one job."""

from integration.net.conftest import make_node, peer

__all__ = ["make_node", "peer"]
