"""One dump or restore as it is kept on record: what it knows, what it did to the node, and how that is undone."""
