"""fedjax_async.data"""
