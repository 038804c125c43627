"""Rows between the processes of a job, and their gradients back. Nothing here knows a model.

- *edge*: rows go from one chunk of a module to another in the forward pass, and their gradients come back
  (`topology.process_grid.Edge`). `point_to_point` moves them by messages from rank to rank, `all_to_all` by
  collectives, in the colocated layout.
- *sender*, *receiver*: what a chunk calls to send its rows, and to receive those it needs: the protocols of
  `sender_receiver`. The sender also receives the gradients, and the receiver sends them.
- *message*: what one rank sends another for one microbatch: a header with the validity of the items
  (`message_header`), and the rows that a `RowSelection` picks (`routing` finds them in the plan's routings).
- *buffer*: collects what several microbatches send, until the program flushes it with one collective. A
  `message_queue` keeps the memory of sent messages until their receiver is known to have them.

`communicators` has the process groups that messages travel over. Tensor-parallel ranks share one through their leader
(`leader_broadcast`). Ranks that work on the same views form a group (`view_groups`), and one of them fetches the views
for all (`view_broadcast`). A chunk's layout decides which of these it uses (`trainclient/layouts/`). In their first
step GPUs exchange rows through host memory (`host_staging`).

Before a collective, ranks compare plans (`plan_check`). What a rank knows alone, it tells the others (`gathering`).
However torch reports a lost rank, it becomes one exception (`lost_ranks`).
"""
