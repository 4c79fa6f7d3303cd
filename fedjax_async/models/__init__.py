"""fedjax_async.models"""
