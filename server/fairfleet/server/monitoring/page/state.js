// What the server has told so far. A message has only what changed; the first one, and one of a server that was restarted, has all.
export const state = { status: null, clients: new Map(), rounds: [], evaluations: [], server_evaluations: [], events: [], skew: 0 };

const LIMITS = { rounds: 200, evaluations: 400, server_evaluations: 400, events: 200 };

export function apply(message) {
  if (message.whole) Object.assign(state, { clients: new Map(), rounds: [], evaluations: [], server_evaluations: [], events: [] });
  state.status = message.status;
  state.skew = message.now - Date.now() / 1000; // the server's clock need not be ours
  for (const row of message.clients) state.clients.set(row.client, row);
  const again = new Set(message.rounds.map((entry) => entry.round)); // a round may be told of again: what its step did is known later
  state.rounds = state.rounds.map((entry) => (again.has(entry.round) ? message.rounds.find(({ round }) => round === entry.round) : entry));
  const known = new Set(state.rounds.map((entry) => entry.round));
  message.rounds = message.rounds.filter((entry) => !known.has(entry.round));
  for (const [name, limit] of Object.entries(LIMITS)) state[name] = [...state[name], ...message[name]].slice(-limit);
}

export const evaluated = () => state.evaluations.filter((entry) => entry.outcomes.reported); // others gave no result at all
export const newest = () => evaluated().at(-1);

const BUILT_IN = ["accuracy", "loss"];

/** What clients are compared by: the server's choice. */
export const measure = () => state.status?.measure || (newest()?.accuracy || !newest() ? "accuracy" : "loss");
/** 1: higher values are better; −1: lower ones. */
export const sign = (what) => (what === "accuracy" ? 1 : what === "loss" ? -1 : figures(evaluated().findLast((entry) => figures(entry, what)), what)?.better === "lower" ? -1 : 1);
/** The figures of a measure over the clients, in an evaluation. */
export const figures = (entry, what) => (BUILT_IN.includes(what) ? entry?.[what] : entry?.measures?.[what]) ?? undefined;
/** A client's newest value of a measure. */
export const value = (row, what) => (BUILT_IN.includes(what) ? row[what] : row.measures?.[what]) ?? null;
/** The measures of the newest evaluation beside loss and accuracy. */
export const own = () => Object.keys(newest()?.measures ?? {});

/** The worst served first, by what clients are compared by; then by loss; those that nothing is known of come last. */
export function need(row) {
  const what = measure(), known = value(row, what);
  if (known != null) return sign(what) * known;
  return row.loss != null ? 1e36 - row.loss : Infinity;
}
