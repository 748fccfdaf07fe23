"""What people and machines see of the server: metrics, the dashboard, logs, event files and HTTP.

`Monitor` follows the events of a federation and answers requests for pages and metrics.
`HttpEndpoint` serves its answers over HTTP. `with_token` and `with_hosts` wrap the function that
answers, to refuse callers. Nothing here changes the federation.
"""

from fairfleet.server.monitoring.http_endpoint import (
    Answer,
    HttpEndpoint,
    HttpLimits,
    Page,
    Pages,
    Request,
    Stream,
)
from fairfleet.server.monitoring.http_hosts import with_hosts
from fairfleet.server.monitoring.http_token import read_token, with_token
from fairfleet.server.monitoring.monitor import Monitor

__all__ = [
    "Answer",
    "HttpEndpoint",
    "HttpLimits",
    "Monitor",
    "Page",
    "Pages",
    "Request",
    "Stream",
    "read_token",
    "with_hosts",
    "with_token",
]
