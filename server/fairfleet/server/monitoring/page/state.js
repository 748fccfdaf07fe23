// What the server has told so far. A message has only what changed; the first one, and one of a server that was restarted, has all.
export const state = { status: null, clients: new Map(), rounds: [], evaluations: [], events: [], skew: 0 };

const LIMITS = { rounds: 200, evaluations: 400, events: 200 };

export function apply(message) {
  if (message.whole) Object.assign(state, { clients: new Map(), rounds: [], evaluations: [], events: [] });
  state.status = message.status;
  state.skew = message.now - Date.now() / 1000; // the server's clock need not be ours
  for (const row of message.clients) state.clients.set(row.client, row);
  const again = new Set(message.rounds.map((entry) => entry.round)); // a round may be told of again: what its step did is known later
  state.rounds = state.rounds.map((entry) => (again.has(entry.round) ? message.rounds.find(({ round }) => round === entry.round) : entry));
  const known = new Set(state.rounds.map((entry) => entry.round));
  message.rounds = message.rounds.filter((entry) => !known.has(entry.round));
  for (const [name, limit] of Object.entries(LIMITS)) state[name] = [...state[name], ...message[name]].slice(-limit);
}

export const evaluated = () => state.evaluations.filter((entry) => entry.loss); // others gave no result at all
export const newest = () => evaluated().at(-1);
export const measure = () => (newest()?.accuracy ? "accuracy" : "loss"); // what clients are compared by

/** The worst served first: by accuracy, else by loss; those that nothing is known of come last. */
export function need(row) {
  if (row.accuracy != null) return row.accuracy;
  return row.loss != null ? 1e6 - row.loss : Infinity;
}
