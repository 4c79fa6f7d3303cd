"""fedjax_async.server"""
