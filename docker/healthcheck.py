"""Exit code 0 when the server answers its health check. Python, because an image need not have curl."""

import os
import sys
import urllib.request

URL = os.environ.get("HEALTH_URL", "http://127.0.0.1:8000/health")
# No proxy: the server is in this container.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

try:
    OPENER.open(URL, timeout=4).close()
except OSError as error:
    sys.exit(f"{URL}: {error}")
