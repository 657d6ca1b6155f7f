"""Parts of a router's HTTP server: JSON bodies and errors, and requests that are forwarded to a replica."""
