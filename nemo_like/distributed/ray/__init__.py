"""Ray: the virtual cluster, actors, worker groups and their failures."""
