"""The closed-form backward map that follows the graph: exact sums over what each row does not show.

Lay a table out once (``layout.lay_out``); then, at any parameters, read the evidence of rows
(``evidence.log_evidence``), its weighed sum with a gradient (``total_evidence``), the statistics of every family
(``expectations``), probabilities of categories (``posterior.state_probabilities``), means and variances of numbers
(``node_moments``), the likeliest joint state (``likeliest_states``) and joint draws of everything unknown
(``posterior_draws``). Points of numbers that have no closed form follow the posterior by ``evidence.moved``. Within a
budget of table sizes rows get coarser points, or are refused (``layout.lay_out_within``).
"""
