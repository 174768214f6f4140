"""Around the routes: sockets, tokens, limits, error bodies, access log and Prometheus metrics."""
