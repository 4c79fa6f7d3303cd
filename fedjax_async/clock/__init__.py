"""fedjax_async.clock"""
