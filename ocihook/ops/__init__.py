"""Use cases: what ocihook does, put together from adapters; no printing, no sockets."""
