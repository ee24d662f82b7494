"""Ray Serve's request router: tells the fleet which replicas there are, and asks it where a request goes."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from strandline.events.resumable import PromptHashes
from strandline.ray.calls import End, Run
from strandline.ray.fleet import Fleet, fleet_named
from strandline.records.messages import EventEndpoints

Ranks = list[list[RunningReplica]]


class FleetRequestRouter(RequestRouter):  # type: ignore[misc]  # ray is not typed where it is not installed
    """Sends ``Run`` where the fleet says, and ``End`` to the replica that it names. Anything else may go anywhere."""

    _fleet: Fleet

    def initialize_state(self, **options: Any) -> None:
        """Take the name of the fleet and of its router."""
        self._fleet = fleet_named(options["fleet"], options["router"])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Tell the fleet which replicas there are, and where their events are."""
        super().update_replicas(replicas)
        self._fleet.set_replicas({replica.replica_id.unique_id: _endpoints(replica) for replica in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Tell the fleet that a replica is gone."""
        super().on_replica_actor_died(replica_id)
        self._fleet.remove(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Ranks:
        """Return the candidates in order of preference, each in a rank of its own."""
        candidates = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        match call:
            case Run(request_id, prompt, salt):
                names = self._fleet.route(request_id, PromptHashes(prompt, salt))
            case End(replica):
                names = [replica]
            case _:
                names = []
        ranks = [[candidates[name]] for name in names if name in candidates]
        return ranks or [candidate_replicas]


def _endpoints(replica: RunningReplica) -> EventEndpoints | None:
    found = replica.routing_stats.get("events")
    return None if found is None else EventEndpoints(*found)
