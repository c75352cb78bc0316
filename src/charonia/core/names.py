"""Keys that identify models: by name, or with namespaces by repository and name.

A key is a model's name, or with namespaces its repository and its name as a path. Names contain no "/".
"""


def model_key(namespace: str, name: str) -> str:
    """Return the key that identifies a model in the server; without namespaces, its name."""
    return f"{namespace}/{name}" if namespace else name


def name_of(key: str) -> str:
    """Return the name in a key."""
    return key.rpartition("/")[2]


def namespace_of(key: str) -> str:
    """Return the namespace in a key, "" if there is none."""
    return key.rpartition("/")[0]
