"""Decentralised algorithms: what a node does with its inbox, and what it sends. No server.

An algorithm is a ``PeerAlgorithm`` (``types.py``), written for one node. ``clock`` plans when nodes train
and what they mix (``PeerSchedule``), ``engine`` executes the plan. ``methods.py`` joins the two by name.

``full_models.py`` is the plain mixing that Async-DFedAvg, SWIFT, D-PSGD and training alone share, and SGP;
``divshare.py`` cuts models into fragments, ``pushcen.py`` sends centroids, ``choco.py`` compressed differences. Their
factories take ``stays(path)``: whether a leaf of the params stays with its node.
"""

from fedjax_async import lazy
from fedjax_async.peers.choco import choco as choco
from fedjax_async.peers.divshare import divshare as divshare
from fedjax_async.peers.full_models import full_models as full_models, sgp as sgp
from fedjax_async.peers.methods import METHODS as METHODS
from fedjax_async.peers.pushcen import pushcen as pushcen
from fedjax_async.types import Event as Event, PeerAlgorithm as PeerAlgorithm

lazy.set_all(__name__)
