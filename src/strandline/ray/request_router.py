"""Ray Serve's request router: it passes the current replicas to the fleet, which chooses the replica of a request."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from strandline.events.resumable import PromptHashes
from strandline.ray.calls import End, Run
from strandline.ray.fleet import Fleet, fleet_named
from strandline.records.messages import EventEndpoints

Ranks = list[list[RunningReplica]]


class FleetRequestRouter(RequestRouter):  # type: ignore[misc]  # ray is not typed where it is not installed
    """Sends ``Run`` to the replica that the fleet chooses, and ``End`` to the one it names; other calls to any."""

    _fleet: Fleet

    def initialize_state(self, **options: Any) -> None:
        """Set the name of the fleet and of its router."""
        self._fleet = fleet_named(options["fleet"], options["router"])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Pass the current replicas and their event endpoints to the fleet."""
        super().update_replicas(replicas)
        self._fleet.set_replicas({replica.replica_id.unique_id: _endpoints(replica) for replica in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica from the fleet."""
        super().on_replica_actor_died(replica_id)
        self._fleet.remove(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Ranks:
        """Return the candidates in order of preference, each in a separate rank."""
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
