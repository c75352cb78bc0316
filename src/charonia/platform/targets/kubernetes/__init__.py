"""The target `kubernetes`: the objects of the Helm chart, applied by the server side, and what has become of them."""
