"""Rows between the processes of a job, and their gradients back. Nothing here knows a model.

- *edge*: rows go from one chunk of a module to another in the forward pass, and their gradients come back
  (`topology.process_grid.Edge`). `message_edges` has the end of one that a process holds, over point-to-point
  messages; the colocated layout has edges whose rows move by all-to-alls.
- *sender*, *receiver*: what a chunk calls to hand its rows on, and to get those it needs (`sender_receiver`). The
  sender also receives the gradients, and the receiver sends them.
- *message*: what one rank sends another for one microbatch: a header with the validity of the items
  (`message_header`), and the rows that a `RowSelection` picks (`routing` finds them in the plan's routings).
- *buffer*: collects what several microbatches send, until the program flushes it with one collective. A
  `message_queue` keeps the memory of sent messages until their receiver is known to have them.

`communicators` has the process groups that messages travel over; tensor-parallel ranks share one through their leader
(`leader_broadcast`), ranks that work on the same views form a group (`view_groups`), and one of them fetches the views
for all (`view_broadcast`). Which of these a chunk uses, its layout decides (`trainclient/layouts/`). New devices take
rows by way of the hosts' memory (`host_staging`).

Before ranks exchange by collectives they compare plans (`plan_check`); a lost rank is one exception (`rank_errors`).
"""
