"""How models are told apart: by name, or with namespaces by the repository, too.

A key is a model's name, or with namespaces its repository and its name as a path. Names hold no "/".
"""


def model_key(namespace: str, name: str) -> str:
    """Return what tells a model apart in the whole server; the name itself where there are no namespaces."""
    return f"{namespace}/{name}" if namespace else name


def name_of(key: str) -> str:
    """Return the name in a key."""
    return key.rpartition("/")[2]


def namespace_of(key: str) -> str:
    """Return the namespace in a key, "" where there is none."""
    return key.rpartition("/")[0]
