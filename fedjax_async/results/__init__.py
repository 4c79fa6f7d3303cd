"""fedjax_async.results"""
