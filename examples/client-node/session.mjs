// A session with a server: it joins, repeats calls, and does for every status code what
// proto/CLIENT.md says.

import { randomBytes } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

import grpc from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';

const PROTO = fileURLToPath(new URL('../../proto', import.meta.url));
const CHANNEL_OPTIONS = {
  'grpc.keepalive_time_ms': 20_000,
  'grpc.keepalive_timeout_ms': 10_000,
  'grpc.keepalive_permit_without_calls': 1,
  'grpc.initial_reconnect_backoff_ms': 200,
  'grpc.max_reconnect_backoff_ms': 1000,
};
const CALL_SECONDS = 15;
const POLL_SECONDS = 45;
const SERVER_BUGS_TOLERATED = 8;
const FAILURES_BEFORE_PATIENCE = 40;
const { status } = grpc;
export { status };

/** The client has to end: no repetition can help. */
export class Stop extends Error {}

function fleetService() {
  const definition = loadSync('fairfleet/proto/v1/fleet.proto', {
    includeDirs: [process.env.FAIRFLEET_PROTO ?? PROTO],
    keepCase: true,
    longs: String, // a seed has 64 bits, more than a JavaScript number
    defaults: true,
    oneofs: true,
  });
  return grpc.loadPackageDefinition(definition).fairfleet.v1.Fleet;
}

/** Return the credentials of a NAME.fleet file; without one, the connection is not encrypted. */
function channelCredentials(file) {
  if (!file) return grpc.credentials.createInsecure();
  const { format, ca, key, certificate } = JSON.parse(readFileSync(file, 'utf8'));
  if (format !== 'fairfleet-credentials-1') throw new Stop(`${file} is not a credentials file`);
  return grpc.credentials.createSsl(Buffer.from(ca), Buffer.from(key), Buffer.from(certificate));
}

export class Session {
  #session = '';
  #since = '0'; // the fence of the first Join of this process
  #failures = 0; // in a row
  #bugs = 0; // of the server, in a row

  /** `join` has the fields of JoinRequest; `onFederation` is called when the federation is new. */
  constructor(address, credentialsFile, join, onFederation) {
    const Fleet = fleetService();
    this.stub = new Fleet(address, channelCredentials(credentialsFile), CHANNEL_OPTIONS);
    this.join = { ...join, instance: randomBytes(8).toString('hex'), protocol_version: 1 };
    this.onFederation = onFederation;
    this.joined = null; // the newest answer to Join
  }

  /** Call until it succeeds. `attempt` gets the session's id; errors that remain are thrown. */
  async repeat(attempt) {
    for (;;) {
      try {
        const answer = await attempt(this.#session || (await this.#join()));
        this.#failures = this.#bugs = 0;
        return answer;
      } catch (error) {
        await this.recover(error);
      }
    }
  }

  /** Call a method with one request and one answer. */
  call(method, fields = {}) {
    const seconds = method === 'NextTask' ? POLL_SECONDS : CALL_SECONDS;
    return this.repeat((session) => this.#unary(method, { session, ...fields }, seconds));
  }

  #unary(method, request, seconds) {
    const deadline = Date.now() + 1000 * seconds;
    return new Promise((resolve, reject) => {
      this.stub[method](request, { deadline }, (error, answer) =>
        error ? reject(error) : resolve(answer),
      );
    });
  }

  async #join() {
    const request = { ...this.join, since: this.#since };
    let joined;
    try {
      joined = await this.#unary('Join', request, CALL_SECONDS);
    } catch (error) {
      const refused = [status.INVALID_ARGUMENT, status.FAILED_PRECONDITION];
      if (refused.includes(error.code)) throw new Stop(`not accepted: ${error.details}`);
      throw error;
    }
    if (joined.protocol_version > 1) throw new Stop('the server speaks another protocol version');
    if (this.joined && joined.federation_id !== this.joined.federation_id) {
      this.joined = null;
      this.#since = '0';
      return this.#join();
    }
    if (this.#since === '0') this.#since = joined.fence;
    if (!this.joined) this.onFederation(joined);
    this.joined = joined;
    this.#session = joined.session;
    return joined.session;
  }

  /** Prepare the next try after an error; throw it if no repetition can help. */
  async recover(error) {
    if (error.code === undefined || error instanceof Stop) throw error;
    const [pause] = error.metadata?.get('fairfleet-retry-seconds') ?? [];
    if (pause !== undefined) {
      await sleep(1000 * Number(pause) * (1 + Math.random() / 4));
      return;
    }
    switch (error.code) {
      case status.UNAVAILABLE:
        // Without this key the connection broke, perhaps because the server restarted.
        if (!error.metadata?.get('fairfleet-error').length) this.#session = '';
        break;
      case status.UNAUTHENTICATED:
        this.#session = '';
        break;
      case status.DEADLINE_EXCEEDED:
      case status.CANCELLED:
        break;
      case status.INTERNAL:
      case status.UNKNOWN:
        this.#bugs += 1;
        if (this.#bugs > SERVER_BUGS_TOLERATED) throw new Stop(error.message);
        break;
      case status.ABORTED:
      case status.ALREADY_EXISTS:
      case status.PERMISSION_DENIED:
      case status.UNIMPLEMENTED:
        throw new Stop(error.message);
      default:
        throw error; // what it means depends on the call
    }
    await this.backOff();
  }

  async backOff() {
    this.#failures += 1;
    const isPatient = this.#failures > FAILURES_BEFORE_PATIENCE;
    const bound = isPatient ? 60 : Math.min(2, 0.1 * 2 ** Math.min(this.#failures, 6));
    await sleep(1000 * (0.05 + Math.random() * (bound - 0.05)));
  }

  /** End the session; the round then continues without this client. */
  async leave(reason) {
    if (this.#session) {
      await this.#unary('Leave', { session: this.#session, reason }, 2).catch(() => {});
    }
    this.stub.close();
  }
}
