"""The addresses of a fleet that runs as actors of a Ray cluster."""

from typing import Final

NAMESPACE: Final = "disttrain"
"""Namespace of the actors, each named by the address of its server."""


def addresses() -> str:
    """The servers of the cluster that this process is connected to, as `--servers` takes them.

    Raises:
        ValueError: there is none.
    """
    import ray  # which most servers and trainers do without

    found = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if _is_server(actor)]
    if not found:
        raise ValueError("the Ray cluster has no data servers; start them with `dataserver ray --config FILE`")
    return ",".join(sorted(found))


def _is_server(actor: dict[str, str]) -> bool:
    return actor["namespace"] == NAMESPACE and ":" in actor["name"]
