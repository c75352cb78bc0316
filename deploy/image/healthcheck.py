#!/opt/charonia/bin/python -I
"""Ends with status 0 if the server in this container is ready, else with 1.

`CHARONIA_HEALTH_URL` replaces port 8000, for a server with other ports or TLS, whose certificate is not
checked: the server is this machine.
"""

import os
import ssl
import sys
import urllib.request

TIMEOUT_S = 4

url = os.environ.get("CHARONIA_HEALTH_URL", "http://127.0.0.1:8000/v2/health/ready")
try:
    urllib.request.urlopen(url, timeout=TIMEOUT_S, context=ssl._create_unverified_context()).close()
except OSError as error:
    sys.exit(f"{url}: {error}")
