'use strict';
// The service as its protos define it, and what its errors ask a client to do.
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const PROTOS = process.env.DISTTRAIN_PROTOS || path.join(__dirname, '..', '..', '..', 'protos');
const FILES = ['disttrain/v1/data_service.proto', 'google/rpc/status.proto', 'google/rpc/error_details.proto'];
// 64-bit integers as strings: sample numbers exceed what a number holds.
const OPTIONS = { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true, includeDirs: [PROTOS] };

const types = loader.loadSync(FILES, OPTIONS);
const { DataService } = grpc.loadPackageDefinition(types).disttrain.v1;

const ACTIONS = ['RETRY', 'ANOTHER_SERVER', 'CREATE_JOB', 'GIVE_UP'];
// What errors without ErrorInfo, which gRPC makes itself, ask for.
const RETRIED = [
  'UNAVAILABLE',
  'DEADLINE_EXCEEDED',
  'RESOURCE_EXHAUSTED',
  'ABORTED',
  'CANCELLED',
  'INTERNAL',
  'UNKNOWN',
];

/** An error with what is to be done about it: `action` is one of ACTIONS, `reason` is for people and logs. */
class DataError extends Error {
  constructor(action, message, reason = '') {
    super(message);
    this.name = 'DataError';
    this.action = action;
    this.reason = reason;
  }
}

/** The ErrorInfo in the trailing metadata of a failed call, if the service sent one. */
function errorInfo(error) {
  const [packed] = error.metadata?.get('grpc-status-details-bin') ?? [];
  if (!packed) return undefined;
  const detail = types['google.rpc.Status']
    .deserialize(packed)
    .details.find(({ type_url: url }) => url.endsWith('/google.rpc.ErrorInfo'));
  return detail && types['google.rpc.ErrorInfo'].deserialize(detail.value);
}

/** The DataError that a failed call, or a broken rule of the protocol, amounts to. */
function dataError(error, server) {
  if (error instanceof DataError) return error;
  if (!Number.isInteger(error.code)) throw error; // not of gRPC: a defect of the caller or of this client
  const status = grpc.status[error.code];
  const message = `${server}: ${status}: ${error.details || error.message}`;
  const info = errorInfo(error);
  if (info?.domain === 'disttrain') {
    const { action } = info.metadata;
    return new DataError(ACTIONS.includes(action) ? action : 'GIVE_UP', message, info.reason);
  }
  if (/CERTIFICATE|certificate|self.signed|altnames|WRONG_VERSION_NUMBER/.test(message)) {
    return new DataError('ANOTHER_SERVER', message); // of TLS: no retry helps
  }
  if (RETRIED.includes(status)) return new DataError('RETRY', message);
  return new DataError(status === 'UNIMPLEMENTED' ? 'ANOTHER_SERVER' : 'GIVE_UP', message);
}

const LOOPBACK = /^(localhost|127(\.\d{1,3}){3}|\[::1\]):\d+$/;

/** gRPC's credentials for a server: encrypted where `ca` is given, with a certificate of this client's own if it has one. */
function credentialsFor(address, { ca, cert, key, token }) {
  if (!!cert !== !!key || (cert && !ca)) throw new DataError('GIVE_UP', 'cert, key and ca belong together: give all three');
  if (ca) return grpc.credentials.createSsl(ca, key ?? null, cert ?? null);
  if (token && !LOOPBACK.test(address)) {
    throw new DataError('GIVE_UP', `a token is to be shown to ${address} over a connection without encryption: give ca`);
  }
  return grpc.credentials.createInsecure();
}

/** An interceptor that shows a token with every call. */
const showing = (token) => (options, nextCall) =>
  new grpc.InterceptingCall(nextCall(options), {
    start(metadata, listener, next) {
      metadata.set('authorization', `Bearer ${token}`);
      next(metadata, listener);
    },
  });

module.exports = { DataService, DataError, credentialsFor, dataError, showing, types };
