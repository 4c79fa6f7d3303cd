"""Decentralised algorithms: what a node does with its inbox, and what it sends. No server.

Start with ``contract.py``: an algorithm is a ``PeerAlgorithm``, written for one node. ``clock`` plans when nodes train
and what they mix (``PeerSchedule``), ``engine`` executes the plan.
"""

from fedjax_async.peers.contract import Event, PeerAlgorithm

__all__ = ["Event", "PeerAlgorithm"]
