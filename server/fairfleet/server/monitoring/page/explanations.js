// What the page's figures mean, shown on hover.
export const TILES = {
  worst: "Mean over the worst-served tenth of the clients, at least one, of the newest evaluated version. The small number is the change since the evaluation before; pp are percentage points.",
  mean: "Mean over all clients that evaluated the newest version. The small number is the change since the evaluation before; pp are percentage points.",
  gap: "How far the worst-served tenth is from the mean. pp are percentage points: the difference of two percentages.",
  angle: "Angle between the clients' values and an equal distribution: 0° means that all are served alike. Gini is 0 and Jain is 1 if all are alike.",
  improved: "ρ, the share of clients that a step improved. Measured: clients whose training loss did not rise, by their next reports. Promised: clients whose loss falls to first order, by the rule's direction. Without measured steps: clients whose evaluation is better than the one before.",
  conflicts: "Clients whose loss the direction of the newest round would raise, to first order, of the clients in it. The streak is the longest run of rounds in which one client was harmed.",
};
export const COLUMNS = {
  client: "Name of the client; worst served first.",
  state: "What the client does. Lost: the round went on without it. Gone: disconnected. Finished: it knows that training is over. Retired: its privacy budget is spent.",
  accuracy: "Newest value on the client's own test data; red: among the worst-served tenth.",
  loss: "Newest loss on the client's own test data; lower is better.",
  updates: "Updates that count / times selected.",
  coefficient: "Weight of its update in the step of the last round that it took part in.",
  cosine: "Cosine between its update and the direction of that round; below 0, the step harms it.",
  conflicts: "Rounds whose direction harmed it, of the newest 200; in brackets, how many of its own in a row.",
  "last seen": "When the client last called the server.",
};
