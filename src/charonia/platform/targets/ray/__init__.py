"""The target `ray`: applications of a Ray cluster, through the REST API of its dashboard."""
