"""The requests to one server. Their functions become methods of `AsyncHttpServerEngineAdapter`."""
