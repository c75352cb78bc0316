"""Keys of models: the name, or with namespaces `REPOSITORY/NAME`. Names contain no "/"."""


def model_key(namespace: str, name: str) -> str:
    """Return the key that identifies a model in the server; without namespaces, its name."""
    return f"{namespace}/{name}" if namespace else name


def name_of(key: str) -> str:
    return key.rpartition("/")[2]


def namespace_of(key: str) -> str:
    """Return the namespace in a key, "" if there is none."""
    return key.rpartition("/")[0]
