"""fedjax_async.engine"""
