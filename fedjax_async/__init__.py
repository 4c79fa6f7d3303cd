"""fedjax_async: a vectorised simulator of asynchronous federated learning in JAX."""
