"""The HTTP application of the gateway: routes, keys of requests, streams and errors."""
