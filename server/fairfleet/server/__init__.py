"""The FairFleet server: aggregation rules, rounds, storage, gRPC services and monitoring."""
