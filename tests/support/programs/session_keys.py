"""Ask mini_s3.py for keys that end, and print them as a ``credential_process`` of an AWS profile does.

Run ``python session_keys.py HOST PORT QUERY``. It is started for every session, so it imports little.
"""

import sys
from http.client import HTTPConnection

if __name__ == "__main__":
    host, port, query = sys.argv[1:]
    connection = HTTPConnection(host, int(port))
    connection.request("POST", f"/_sessions?{query}")
    print(connection.getresponse().read().decode())
