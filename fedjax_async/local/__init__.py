"""fedjax_async.local"""
